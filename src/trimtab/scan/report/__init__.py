"""A report as text, JSON or HTML. Renderers take values and return or print text; none of them judges."""
