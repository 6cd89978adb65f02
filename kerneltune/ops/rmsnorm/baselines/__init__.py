"""Published designs of RMSNorm, written anew."""
