"""What is done with a run when its events are there. Nothing here is measured, and the build's identity
does not depend on it: an edit makes this again and no measurement.
"""
