"""How ranks talk: :mod:`.comm`, which strategies see, over the ports of a world (:mod:`.ports`)."""
