"""``linattn new-backend``: writes a plug-in project that is complete, correct and slow."""

from .project import Project, write

__all__ = ["Project", "write"]
