"""The laws that tests of the integration judge where no single item of the specification does: name and sentence."""

LAWS = {
    "eviction-equals-masking": "The output equals that of the full cache with the evicted tokens masked.",
    "decided-as-the-reference":
        "What is read off a model is the model's own, and what is made of it is what the reference makes of it.",
    "parts-equal-the-whole":
        "Rows of a batch, pieces of a text and single calls give what the row alone and the whole text give.",
    "a-cache-like-any-other":
        "Tokens and rows are found, hidden, chosen, copied and taken back, and gradients flow, as in any cache.",
    "freed-memory": "Room is held for what is kept alone: no slot, view or reference of what was evicted is left.",
    "the-model-stays-as-it-was":
        "What is only read, the model above all, stays as it was; what evicts nothing changes no bit of the output.",
    "refused-before-anything-changes": "What is not served is refused by name, before anything changes.",
    "unusable-after-a-failure": "What fails half way leaves what was there before, or refuses to be used any further.",
    "saved-is-what-was":
        "What is saved or put comes back as it was, from a codec within its step, and goes on as it would have.",
    "an-identity-tells-apart": "What is equal has one identity, and whatever differs has another.",
    "a-splice-equals-a-block-mask":
        "A session with chunks equals one forward in which masks keep apart what was read apart.",
    "promised-is-there-forgotten-is-not":
        "Whatever fails or is killed, what was promised is there, and what was forgotten or evicted is nowhere.",
    "an-object-proves-itself": "What is damaged or crafted is noticed, is never used, and stops nothing else.",
    "nothing-readable-without-the-key":
        "Without the key, the tenant's name or the rights, an object is not read and tells nothing.",
    "one-line-with-the-way-out": "A mistake on the command line is one line that names the way out, before any work.",
    "figures-are-counted-right": "What is reported or drawn is all of what was measured, as counting by hand has it.",
    "as-it-is-described": "Tasks, models, names, defaults and commands are what their descriptions say.",
    "the-proof-has-teeth": "A mistake that is made on purpose fails the check that is there for it.",
}
