"""Wrong changes to the engine, each of which some test must notice.

python -m tests.mutants                 # all of them: make mutants
python -m tests.mutants --only R1 X12   # some
"""
