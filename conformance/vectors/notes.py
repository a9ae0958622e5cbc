"""The flags of the vectors: each names a mistake that the vector catches."""

__all__ = ["NOTES"]

# Flag: kind of mistake, and what goes wrong.
NOTES: dict[str, tuple[str, str]] = {
    "Plain": ("BASIC", "A first case without a trap: the equation as it is written."),
    "BandHalves": ("LAYOUT", "A rotary band is channels f and f + d / 2; neighbouring channels are other bands."),
    "Modular": ("READING", "A prior for a fixed direction looks at no kept token, so that copies stay together."),
    "NoBonus": ("READING", "Redundancy is at least 0: an opposite direction earns no bonus."),
    "PositionCancels": ("READING", "A key turned back by its position, then probed from there, is the cached key."),
    "RetainedCounts": ("READING", "Tokens that are kept anyway are in the set before the first pick."),
    "BreathOrder": (
        "READING", "Decay comes before the breath; in it activation, pulses, growth, new trunks, eviction.",
    ),
    "BudgetOfSeen": (
        "READING", "Eq. 30 in decode takes a fraction of the tokens seen; of the cache it would shrink for ever.",
    ),
    "CapAtOne": ("BOUNDARY", "min(1, W + eta) lowers a weight above 1, which the additive multiset can make."),
    "DeadTrunks": ("READING", "A trunk without a token leaves table and graph; numbers after it move up."),
    "LiveMembers": ("READING", "What counts of a trunk are its live tokens, wherever it began and ended."),
    "MeanOfInverses": ("READING", "The mean over heads is of inverses, not the inverse of a mean."),
    "MoreThanHalf": ("BOUNDARY", "Active means more than half of the members, so one of two is not."),
    "NoNewEdge": ("READING", "Eq. 39 strengthens edges; it makes none."),
    "OncePerPulse": ("READING", "Eq. 38 is applied for each pulse that arrives, not for their sum or maximum."),
    "ProtectionForm": ("PARAMETER", "At a breath nobody is protected, unless the parameter says so."),
    "PruneAfterUpdate": ("READING", "Edges are pruned by their weight after the update, all of them."),
    "SeenCounts": ("READING", "Rarity counts all tokens seen, evicted ones and later ones too."),
    "SourceReceives": ("READING", "The active trunk itself receives a pulse of 1."),
    "StrongestParent": ("READING", "Of several ways in at one hop the strongest counts, not the first or the sum."),
    "TailFirst": ("READING", "A turn finds the tail as trunks: it can be read, linked and evicted."),
    "TailSentences": ("READING", "The tail is segmented without edges, and the cut ends its last sentence."),
    "VisitedSet": ("READING", "A search reaches a trunk once, at its first hop."),
    "ZeroKey": ("NUMERIC", "A key of length 0 has no inverse norm: it is infinite, and eta is 1."),
    "AblationForm": (
        "PARAMETER", "An ablation of Table 10 is a parameter's value; it is ignored, or read as another rule.",
    ),
    "ActiveOnly": (
        "READING", "Direct renewal adds a share of 1 - D, to active trunks alone; a share of D starves the weak.",
    ),
    "AdditiveMultiset": (
        "READING", "A mutual pair of tokens counts twice in W_ab; a set or a maximum counts it once.",
    ),
    "AtLeastOne": ("BOUNDARY", "A share of the tokens is floored, but never none: ten percent of five tokens is one."),
    "BackwardEdge": (
        "READING",
        "Eq. 17 is literal: the first endpoint lies in the running trunk; either orientation merges too much.",
    ),
    "CausalByPosition": (
        "MASK", "The mask compares positions, not slots; a mask aligned to a corner shows or hides keys.",
    ),
    "ChunkOfSegment": (
        "READING", "Chunks of C count from the segment's first token, not from position 0 of the cache.",
    ),
    "ChunkOwnQueries": (
        "READING", "Salience sums over the queries of the key's own chunk, not over all later queries.",
    ),
    "ClipAtBounds": ("NUMERIC", "Values are clipped to [M_min, M_max], after the sum."),
    "CutEqualsTotal": ("BOUNDARY", "The cut is all that is unprotected: every trunk goes, and none is partial."),
    "CutHeldToAlive": ("BOUNDARY", "Without the outer minimum of Eq. 31 the cut exceeds what Eq. 32 may remove."),
    "DecimalFraction": (
        "NUMERIC", "A fraction is the decimal that is written; binary products round up to one token more.",
    ),
    "DirectedTriples": (
        "READING", "Edges are directed: intra (owner, neighbour), cross (source, owner), in a stated order.",
    ),
    "EmptyResult": ("BOUNDARY", "Nothing to choose from: an empty result, no error and no NaN."),
    "EpsilonOutside": ("NUMERIC", "Epsilon is added to the norm, outside the root; a zero row stays zero."),
    "EvenlySpaced": (
        "READING", "Coverage tokens stand in the middle of equal parts of the evicted tokens, counted by rank.",
    ),
    "Float32Tie": ("NUMERIC", "Weights that differ in float64 but not in float32 tie: the lower index comes first."),
    "FloorOfBudget": ("READING", "B is at least N_sink + W_recent, for counts too, and may exceed n."),
    "HalfToEven": ("NUMERIC", "round takes a half to the even neighbour: 4.5 tokens are 4, 5.5 are 6."),
    "HalfUp": (
        "NUMERIC", "A tier's half token is rounded up, on exact rationals: 5 of 9 at ratio 1/2, where Eq. 33 gives 4.",
    ),
    "HeadSharing": ("LAYOUT", "Query head h reads KV head h // (H / H_kv); interleaving pairs the wrong ones."),
    "InclusiveSize": ("BOUNDARY", "A merged trunk may hold exactly T_max tokens; a sentence may be longer by itself."),
    "LaterSegment": ("LAYOUT", "Positions are absolute: offsets and neighbours of a later segment do not start at 0."),
    "LiteralOrientation": ("READING", "The window is last five times first five, in this order."),
    "LogOnePlus": (
        "NUMERIC",
        "The natural logarithm of 1 + c, or of 1 + Mbar; another base or log(c) orders alike but scores apart.",
    ),
    "LowerMedian": (
        "READING", "The adaptive threshold is the lower median over all neighbouring sentences, edgeless ones too.",
    ),
    "MeanBeforeHeads": ("READING", "The three largest heads are summed, not averaged."),
    "MeanOfHeads": (
        "READING", "The essay averages a token's own best heads: over three, or over all where there are fewer.",
    ),
    "MultipliedOut": ("NUMERIC", "The merge decides sum(w) - tau k > 0; a rounded mean decides otherwise."),
    "MutualPair": ("READING", "Two tokens that chose each other are two edges."),
    "NothingUnprotected": (
        "BOUNDARY", "Every trunk is protected: no minimum of an empty set, no score, everything stays.",
    ),
    "OneChunk": ("BOUNDARY", "With C >= n there is one chunk and no cross edge."),
    "OneToken": ("FORMS", "An int or digits are tokens (1 is one token); a float is a fraction (1.0 is everything)."),
    "OwnKeysFirst": ("READING", "Eq. 12 restricts to the chunk's own keys, then normalises."),
    "PartialKeepsBest": ("READING", "A partial trunk keeps its largest M_i, listed in ascending position."),
    "PopulationSigma": (
        "READING", "sigma is the population standard deviation; the sample's differs, and fails for one trunk.",
    ),
    "ProtectedAboveBudget": ("BOUNDARY", "Protected trunks alone exceed B: all of them stay, everything else goes."),
    "ProtectedNotRead": (
        "READING", "A protected trunk's score is NaN and is never read; it takes no part in minimum and maximum.",
    ),
    "Refused": ("VALIDATION", "Input that is not admitted is refused by the name of its argument, before any work."),
    "RectifiedSurprise": (
        "READING", "Surprise is normalised, then centred and cut at 0; as Eq. 13 has it, the gate never opens.",
    ),
    "RemnantOne": ("BOUNDARY", "One token would remain: fewer than N_min, so the whole trunk goes, an overshoot."),
    "RemnantTwo": ("BOUNDARY", "Two tokens would remain: fewer than N_min, so the whole trunk goes, an overshoot."),
    "RemnantThree": ("BOUNDARY", "Exactly N_min tokens remain, which is enough: >= and not >."),
    "RemnantZero": ("BOUNDARY", "N_min = 0 and N_min = 1 are one rule: no trunk keeps 0 tokens as a partial one."),
    "SaturatedLogistic": ("NUMERIC", "The logistic must not overflow for large negative arguments."),
    "SelfInTopK": ("READING", "A token is left out before its neighbours are chosen; else it takes a place."),
    "SentenceRuns": (
        "BOUNDARY", "Consecutive ends are sentences of one token; the rest after the last end is one too.",
    ),
    "ShareOfLargest": (
        "READING", "Unit impact divides salience by the segment's largest, not by M_max and not from the least.",
    ),
    "ShortBlock": ("BOUNDARY", "What is left at the end is a block of its own; it joins no other."),
    "SigmaFallback": ("READING", "Where sigma < epsilon, sigma = 1; max(sigma, epsilon) blows up rounding noise."),
    "RarityShape": (
        "PARAMETER", "A rarity form stands wherever U_i does; the logarithm is the default.",
    ),
    "SinksInside": (
        "READING", "Sinks take part in the statistics; then they are pinned, inside the budget and inside the quota.",
    ),
    "SoftCap": ("NUMERIC", "The soft cap is applied to the scaled logit, before the mask."),
    "SplitLargerFirst": ("READING", "Pieces differ by at most one token, the larger ones first; none exceeds T_max."),
    "StableOrder": ("TIE", "Positions and rows ascend; sorting by another key loses the order."),
    "StrictThreshold": ("BOUNDARY", "A weight equal to its threshold is not above it."),
    "SumOrder": ("NUMERIC", "Floats are added left to right in the stated order; another order has other bits."),
    "TieAtBoundary": ("TIE", "Equal values at the cut: lower index first, for eviction the lower trunk first."),
    "TierAtEnd": (
        "BOUNDARY", "Tier boundaries are clipped to the trunks; one middle trunk alone keeps 0.8.",
    ),
    "TierShift": (
        "READING", "Both boundaries move by the least t that keeps the budget; the excess goes from the worst up.",
    ),
    "TokenIds": ("LAYOUT", "Ids are labels: large or unsorted ids count like any others."),
    "TopThreeOfTrunk": (
        "READING", "Trunk impact is the mean of the three largest members, or of all if there are fewer.",
    ),
    "TopThreeSum": ("READING", "Each token has its own three largest heads; three heads for all tokens are others."),
    "UnitInterval": (
        "READING", "Trunk impact is normalised by the least and the greatest of all trunks, not by the greatest alone.",
    ),
    "ExactTwoSided": ("NUMERIC", "The exact binomial p of both sides, at most 1; not mid-p, not chi-square."),
    "HalfOpenRegion": ("BOUNDARY", "Layers and tokens are half-open ranges; an odd middle layer is upper."),
    "LastEndThatFits": ("READING", "A chunk ends after the last sentence end that fits, and the rest stays whole."),
    "NegativeStart": ("BOUNDARY", "A hidden preamble may stand before position 0: the shift is negative."),
    "NoPairs": ("BOUNDARY", "A layer without positions has no pairs of channels, and nothing turns."),
    "OneMarkerId": ("VALIDATION", "A marker is one id that decodes to its text; the unknown token is none."),
    "OutermostResamples": ("BOUNDARY", "floor of the share is left out on each side; a mean of 0 is not above 0."),
    "PairsOfDrawnClusters": ("READING", "The mean runs over the pairs of the drawn clusters, not over the clusters."),
    "PairsOfTheRotatedPart": ("LAYOUT", "Pairs lie inside the rotated channels; the others keep their bits."),
    "PartsEncodedAlone": ("LAYOUT", "Each part is encoded alone, and the chunk's own ids are never encoded again."),
    "RanksFromOne": ("READING", "The first rank is 1; repeats of a name are removed before ranks are counted."),
    "SameTurn": ("READING", "Every token of a chunk turns by the same angle; its own index is in its key already."),
    "ShapeOfTheScale": ("LAYOUT", "The scheme names the shape of the scale: per head is not per channel."),
    "StaysInside": ("BOUNDARY", "The interval lies in [0, 1] and has a width where every answer is the same."),
    "SymmetricRange": ("READING", "Codes reach from -q to q; -q - 1 is not used."),
    "TotalOrder": ("TIE", "Equal scores, up to rounding, are ordered by name."),
    "ZeroGroup": ("NUMERIC", "A group of zeros has the smallest scale, no division by zero."),
    "ZeroShift": ("NUMERIC", "An angle of 0 keeps every bit, that of a negative zero too."),
    "WholeTrunkProtected": (
        "READING", "A trunk that touches the sink or the window is protected as a whole; intervals are half open.",
    ),
    "WindowOfFive": ("BOUNDARY", "Five tokens on each side of an interface, fewer where a side is shorter."),
    "ZeroRange": ("BOUNDARY", "Values without range, or a mean without direction, give zeros, not enlarged noise."),
}
