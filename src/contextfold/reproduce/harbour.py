"""A short document about a place that does not exist, and questions that only it answers."""

from __future__ import annotations

__all__ = ["DOCUMENT", "JUDGED", "REFERENCE"]

DOCUMENT = (
    "Notice for ships that call at Sellow Harbour. The harbour lies on the north bank of the river Tamber, four miles "
    "from the open sea, and its channel is nine metres deep at low water. Ships longer than eighty metres must take a "
    "pilot on board at the red buoy, which is called Old Martha. The pilot boat is painted orange and listens on "
    "channel 14. Speed in the channel is limited to six knots, because the banks are soft and wash away.\n"
    "There are three quays. The Corn Quay takes grain and flour; the Salt Quay takes fish, ice and salt; the Long Quay "
    "takes timber. Coal is not landed at Sellow any more, since the coal crane broke in the storm of 1958 and was sold "
    "for scrap. Harbour dues are two crowns for each tonne of cargo, and fishing boats from the valley pay nothing. "
    "Water can be taken at the Salt Quay at any hour; fuel is sold at the Long Quay on Tuesdays and Fridays only.\n"
    "The lock to the upper basin opens one hour before high water and closes one hour after it. It is worked by the "
    "lock house, whose bell rings twice before the gates move. In fog the horn at the end of the mole sounds every "
    "forty seconds, and no ship may leave the quay. In winter the upper basin freezes in most years, so ships that "
    "stay from December to February must lie at the Corn Quay, where a warm spring keeps the water open. Complaints go "
    "to the harbour office in Lantern Street, which is open from seven in the morning until noon.\n"
)

REFERENCE = (
    ("On which river does Sellow Harbour lie?", "It lies on the river Tamber."),
    ("How deep is the channel at low water?", "The channel is nine metres deep."),
    ("Where do long ships take a pilot?", "They take a pilot at the red buoy, Old Martha."),
    ("What colour is the pilot boat?", "The pilot boat is orange."),
    ("How fast may a ship go in the channel?", "It may go six knots."),
    ("What does the Salt Quay take?", "It takes fish, ice and salt."),
    ("Why is coal not landed any more?", "The coal crane broke in the storm of 1958."),
    ("How much are harbour dues?", "They are two crowns for each tonne of cargo."),
    ("When is fuel sold?", "Fuel is sold on Tuesdays and Fridays."),
    ("When does the lock open?", "It opens one hour before high water."),
    ("How often does the horn sound in fog?", "It sounds every forty seconds."),
    ("Where must ships lie in winter?", "They must lie at the Corn Quay."),
)
"""Question and answer, to learn from."""

JUDGED = (
    ("What is the name of the river at Sellow?", "The Tamber."),
    ("The tide is out. How many metres of water are in the channel?", "Nine metres."),
    ("What is the red buoy called?", "Old Martha."),
    ("I am looking for the pilots. What colour should I watch for?", "Orange."),
    ("What is the speed limit, and why?", "Six knots, because the banks are soft."),
    ("We carry ice. Which quay is ours?", "The Salt Quay."),
    ("What happened to the coal crane?", "It broke in the storm of 1958."),
    ("What do we owe for one tonne of cargo?", "Two crowns."),
    ("Can we buy fuel on a Friday?", "Yes, at the Long Quay."),
    ("How long after high water do the lock gates close?", "One hour after high water."),
    ("How many seconds pass between two blasts of the horn?", "Forty seconds."),
    ("Why does the water at the Corn Quay stay open in January?", "A warm spring keeps it open."),
)
"""Other words about the same document, to be judged by."""
