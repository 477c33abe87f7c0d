"""From a slime or Vime launch script to our command: the script is read, never run."""
