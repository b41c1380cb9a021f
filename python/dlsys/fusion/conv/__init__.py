"""Fusions around convolutions: what runs before and behind them, their layout, their updates."""
