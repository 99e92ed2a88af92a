"""`make bench`: what kvstow costs and gains, measured here."""
