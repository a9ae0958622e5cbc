"""The documentation site: `nox -s lab -- docs` writes its pages into build/docs, builds and checks them."""
