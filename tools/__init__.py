"""Scripts that create files shipped with this repository, such as reference pages, dashboards and
tiny models. Serving does not import this package."""
