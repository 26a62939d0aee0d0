"""What ``linattn bench`` runs, and under ``results/`` the figures it wrote."""
