"""The JSON vectors of spec/vectors as the suite reads them; `*_subject` run the judged code on each."""
