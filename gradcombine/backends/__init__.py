"""Array primitives for algorithms (`protocol`), one implementation per framework, and their lookup (`registry`)."""
