"""Builds the site of the documentation: ``scripts/docs`` runs it.

The pages in ``docs/`` are plain Markdown, whose links work on a code host. ``stage`` copies them
into a folder, fills in what is generated, and lets links that lead out of ``docs/`` lead to pages
of the site. Zensical builds that folder, and ``check`` looks at what it built.
"""
