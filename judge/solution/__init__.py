"""A solution of a benchmark problem in a process of its own: how it is loaded, called, watched and given its inputs."""
