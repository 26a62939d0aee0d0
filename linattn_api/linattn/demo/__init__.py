"""The language model that ``linattn demo`` runs. No part of the stable API: it may change in any release."""
