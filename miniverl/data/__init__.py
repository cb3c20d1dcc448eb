"""From files or a generator to `Prompt`s: reading, templates, masks, length limits and a resumable order.

Nothing here knows models or workers.
"""
