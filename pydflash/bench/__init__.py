"""`pydflash bench`: acceptance and speed over prompt files."""
