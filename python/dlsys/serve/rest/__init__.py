"""The service over HTTP: connections, the gateway behind them, routes, and the page."""
