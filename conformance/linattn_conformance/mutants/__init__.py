"""Faults that nobody chose: a right backend with a fault made of a condition and an effect, both drawn from a seed.

A condition is any fact of a call, of what came before it or of what is around it (:mod:`.conditions`); an effect is what goes
wrong then (:mod:`.effects`). Nothing here knows how the cases of the suite are chosen: conditions are drawn over the space of
valid calls (:mod:`.drafts`), and a fault counts if some valid call shows it (:mod:`.visible`). ``linattn conformance-mutants``
says which share of them the suite catches (:mod:`.trial`).
"""
