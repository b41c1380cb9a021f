"""From a plan to results: the runners for numpy and for native devices, and what feeds them."""
