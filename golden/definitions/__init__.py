"""The definitions of the ops, one family a file; every module here is loaded when a spec is first asked for."""
