"""The language model that ``linattn demo`` runs."""
