"""Arguments of operators, layers and functions: declared once, checked at the call."""
