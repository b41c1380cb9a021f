"""`dlsys detect`: trains networks that find things in photographs, shows and measures them."""
