"""The `docker` sandbox from within: the daemon's API, streams, scripts for inside."""
