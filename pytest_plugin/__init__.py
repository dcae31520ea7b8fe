"""The pytest plugin: the fixture ``assay``, the ``--assay-*`` options, the terminal summary, the reports of a run."""
