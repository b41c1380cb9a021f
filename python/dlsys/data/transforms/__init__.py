"""What is done to samples on their way into a batch: normalization and augmentation."""
