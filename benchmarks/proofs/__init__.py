"""What holds, with its record: losses, accuracies, attacks, all tests on a GPU."""
