"""The words that the pocket model's training text is made of: subjects of facts, and parts of filler."""

import string

import numpy as np

__all__ = [
    "ADJECTIVES", "FILLER_CLAUSES", "FILLER_ENDINGS", "FILLER_OBJECTS", "FILLER_SUBJECTS", "FILLER_VERBS", "LETTERS",
    "NAMES", "QUANTITIES", "ROLES", "THINGS", "invented_word",
]


def _words(text: str) -> tuple[str, ...]:
    """Split at any space."""
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    """Split at bars; a phrase may hold spaces and may be empty."""
    return tuple(phrase.strip() for phrase in text.split("|"))


def invented_word(rng: np.random.Generator) -> str:
    """An invented word of two or three syllables, which the tokenizer has to spell byte by byte."""
    count = int(rng.integers(2, 4))
    syllables = (
        _ONSETS[int(rng.integers(len(_ONSETS)))] + _RIMES[int(rng.integers(len(_RIMES)))] for _ in range(count)
    )
    return "".join(syllables)


_ONSETS = _words("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w z")
_RIMES = _words("a an ar e el en i in ir o ol on or u um us ax ex ix")

NAMES: tuple[str, ...] = _words(
    """Adler Alden Amber Apollo Archer Arden Ashford Atlas Avalon Barlow Basil Beacon Birch Blaine Bowen Bramble
    Briar Brook Calder Camden Carson Cedar Chandler Chester Clover Cobalt Comet Conrad Coral Cosmo Cypress Darwin
    Delphi Denver Drake Dune Eagle Echo Eden Elmer Ember Emery Everest Fern Finch Fletcher Fox Galaxy Garnet
    Gideon Glacier Granite Grove Gulf Hadley Harbor Hawk Hazel Helios Hudson Indigo Iris Ivory Jasper Juniper
    Kepler Kingsley Lagoon Larch Laurel Linden Lotus Lynx Magnet Maple Marble Mercer Merlin Monarch Morgan Nebula
    Nelson Nimbus Nova Oakley Ocean Olive Onyx Opal Orbit Orchid Orion Otter Palmer Pearl Phoenix Pilot Pioneer
    Porter Prairie Quartz Quest Quinn Ramsey Ranger Reed Ridge River Robin Rowan Ruby Saber Sable Saffron Sawyer
    Shadow Sierra Sigma Solar Spencer Sterling Summit Sutton Tempest Thistle Thorn Timber Topaz Trident Tucker
    Tundra Umber Valley Vector Velvet Vesper Violet Walker Warren Weaver Willow Winter Wolf Yarrow Zenith"""
)

LETTERS: tuple[str, ...] = tuple(string.ascii_uppercase)

ADJECTIVES: tuple[str, ...] = _words(
    """amber bright calm clean cold cool dark deep dry early empty famous fast fine flat fresh full gentle grand
    green grey happy hard high hollow large late light little local long loud low main major minor modern narrow
    northern open orange outer pale plain private proud public purple quick quiet rare ready red rich rough round
    royal safe sharp short silent simple slow smooth soft southern square steep still strong tall thick thin tiny
    upper warm western white wide wild wooden yellow young"""
)

THINGS: tuple[str, ...] = _words(
    """vault satellite station engine tower bridge tunnel locker gate garden cabin elevator mill museum harbor
    printer reactor server telescope theater valve warehouse lantern furnace antenna ferry kitchen laboratory
    greenhouse workshop"""
)

QUANTITIES: tuple[str, ...] = _phrases(
    """secret code|access key|serial number|room number|pin code|target weight|account number|flight number
    |safe combination|entry code|badge number|order number|base pressure|total distance|final score|reference number
    |storage limit|radio frequency|activation temperature|extraction point|meeting point|ticket number|locker number
    |station code|current price|visitor count"""
)

ROLES: tuple[str, ...] = _words(
    """Agent Project Doctor Formula Captain Mission Operation Professor Station Team Unit Officer"""
)

FILLER_SUBJECTS: tuple[str, ...] = _phrases(
    """the board|the committee|the department|the director|the engineers|the finance group|the manager|the members
    |the office|the panel|the planning team|the staff|the supervisor|the support team|the teachers|the visitors
    |the volunteers|the writers|several colleagues|two analysts|a new assistant|an outside adviser|our partners
    |the regional offices|the library|the archive|the research group|the agents|the contractor|the auditors
    |most participants|some customers|the handler|the laboratory|the field team|the students"""
)

FILLER_VERBS: tuple[str, ...] = _phrases(
    """reviewed|discussed|updated|prepared|presented|approved|compared|described|revised|shared|collected|ordered
    |moved|checked|tested|confirmed|covered|scheduled|completed|followed|introduced|labelled|noted|organised|planned
    |postponed|published|questioned|received|replaced|requested|sent|signed|studied|summarised|supported
    |adjusted|reallocated"""
)

FILLER_OBJECTS: tuple[str, ...] = _phrases(
    """the agenda|the annual report|the budget|the catalogue|the contracts|the draft|the equipment|the forecast
    |the forms|the guidelines|the inventory|the invoices|the journals|the letters|the maps|the menu|the minutes
    |the notes|the open questions|the plan|the policy|the records|the results|the schedule|the seating plan
    |the shelves|the summary|the timeline|the training program|the travel requests|the windows|the workshop
    |several proposals|a short survey|new milestones|a list of projects|the latest trial|the quarterly review
    |the resources|the mission status|the concentration levels|the ongoing initiatives"""
)

FILLER_ENDINGS: tuple[str, ...] = _phrases(
    """|after lunch|again|at the next assembly|before the deadline|before the end of the week|during opening hours
    |during the break|for the second time|in detail|in the main building|in the meeting|last month|near the entrance
    |next month|on the second floor|on time|this quarter|this spring|this week|together|twice|with care
    |with a small panel|without delay|yesterday|as scheduled|as planned|for the new season|across the courtyard
    |in the reading room|over the summer|by the end of the day|from the internal website"""
)

FILLER_CLAUSES: tuple[str, ...] = _phrases(
    """Everyone agreed that|It was clear that|The chair explained that|A notice said that|Later|In the morning
    |As a result|At first|According to the minutes|In most cases|The report mentioned that|For this reason
    |Meanwhile|On the whole|Once more"""
)
