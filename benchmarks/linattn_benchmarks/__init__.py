"""What ``linattn bench`` runs."""
