"""The program `crosswire`: one module a command, imported when it is asked for."""
