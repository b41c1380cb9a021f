"""`dlsys superres`: trains networks that enlarge photographs, enlarges some, and measures them."""
