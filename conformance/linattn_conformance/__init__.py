"""The conformance suite of linattn: is a backend right?

``linattn conformance --backend acme``, ``python -m linattn_conformance --backend acme``, or in pytest
``pytest --pyargs linattn_conformance --linattn-backend acme``.

=====================  ===============================================================================
``cases``              what is tried; an id for each
``bad_input``          wrong calls and the errors expected
``manifest``           the ids that belong to an API version, checked in
``data``               the arrays of a case
``bounds``             truth, noise and how far a result may be from the truth
``calls``, ``checks``  one case against one backend
``witness``            who really ran
``adapters``           one small class for each array framework
``runner``             cases to results, in this process
``resuming``           going on with a run that was cut short
``pool``, ``worker``   the same in processes that are replaced when they are lost
``known_failures``     what a vendor knows to be broken
``verdict``            profiles; manifest minus results
``report``             versioned JSON
``packed``             files that are compressed if their name says so
``reading``            is a report what a run wrote?
``comparing``          what changed between two
``rendering``          pages of one report, and the matrix of several
``search``, ``soak``   generated cases, for what the manifest did not think of
``cli``, ``commands``  the commands; ``pytest_plugin`` the same in pytest
``broken``             backends that are wrong on purpose, which the suite must reject
=====================  ===============================================================================
"""
