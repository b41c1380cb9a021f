"""`dlsys explain`: shows which pixels of photographs speak for what a network takes them for."""
