"""What benchmarks measure against: other forms of the same methods, and the authors' programs.

README.md beside this file says how the authors' program is timed.
"""
