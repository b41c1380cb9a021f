"""Two versions of dlsys held against each other: their bits and their speed."""
