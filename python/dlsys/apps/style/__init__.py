"""`dlsys style`: paints photographs in the style of a picture, by optimization or by a network."""
