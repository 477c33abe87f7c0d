"""`vime doctor`: what is installed, what the machine gives, and a self-test of both."""
