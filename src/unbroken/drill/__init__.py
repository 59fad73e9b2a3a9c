"""The rehearsal: a script is killed and resumed on purpose, and compared with one that was left alone.

Works from outside: the script is started as the user would start it, by a plan in a file, and what it
had at each step is read from the record that it leaves.
"""
