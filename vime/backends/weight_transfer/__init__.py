"""What trainer and engines share for a weight sync: the control client, the shared-memory segments, and the digest."""
