"""`dlsys cifar`: trains a residual network on CIFAR-10 fast, and measures it."""
