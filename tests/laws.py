"""Laws that tests of the integration check if no single item of the specification applies: name and sentence."""

LAWS = {
    "eviction-equals-masking": "The output equals that of the full cache with the evicted tokens masked.",
    "decided-as-the-reference":
        "Values that are read from a model are the model's values, and results from them equal those of the reference.",
    "parts-equal-the-whole":
        "Rows of a batch, pieces of a text and single calls give the results of the single row and of the whole text.",
    "a-cache-like-any-other":
        "Tokens and rows are found, hidden, selected, copied and removed as in any cache, and gradients flow.",
    "freed-memory": "Memory is held only for kept tokens: no slot, view or reference of an evicted token is left.",
    "the-model-stays-as-it-was":
        "Objects that are only read, such as the model, are unchanged. Without eviction, no bit of the output changes.",
    "refused-before-anything-changes": "Unsupported input raises an error that names it, before anything changes.",
    "unusable-after-a-failure": "After a failure, the earlier state is unchanged, or the object refuses further use.",
    "saved-is-what-was":
        "A saved object is loaded unchanged, or within the step of its codec, and continues as the original would.",
    "an-identity-tells-apart": "Equal objects have one identity, and different objects have different identities.",
    "a-splice-equals-a-block-mask":
        "A session with chunks equals one forward pass with masks that separate what was read separately.",
    "promised-is-there-forgotten-is-not":
        "After any failure or kill, promised data is stored, and forgotten or evicted data is nowhere.",
    "an-object-proves-itself": "A damaged or crafted object is noticed, is never used, and affects no other object.",
    "nothing-readable-without-the-key":
        "Without the key, the tenant's name or the rights, an object is not read and reveals nothing.",
    "one-line-with-the-way-out": "An error on the command line is one line that says what to type, before any work.",
    "figures-are-counted-right": "Reported or drawn numbers cover all measurements, and equal those counted by hand.",
    "as-it-is-described": "Tasks, models, names, defaults and commands match their descriptions.",
    "the-proof-has-teeth": "A planted error fails the check that is meant to find it.",
}
