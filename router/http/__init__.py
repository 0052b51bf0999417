"""The application: routes, limits, keys, error bodies, and server-sent events."""
