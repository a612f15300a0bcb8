"""Files that no honest program writes, each wrong in one way; none may end the command in a
signal."""
