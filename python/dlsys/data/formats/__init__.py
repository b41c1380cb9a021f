"""Readers of files: MNIST, CIFAR, tables, folders of images; where they lie and how they come."""
