"""Code that tests share; fixtures and hooks are in the conftest files."""
