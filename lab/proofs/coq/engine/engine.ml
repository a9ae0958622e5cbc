(* The extracted model as an engine of spec/protocol.md, for the stages that it has; engine.py offers whole families.
   Only this file and OCaml's arithmetic on floats stand between the model and its requests. *)
module Whole = Z
open Model

let binary64 = {
  zero = 0.; plus = ( +. ); minus = ( -. ); times = ( *. ); over = ( /. ); of_Z = Whole.to_float; ltb = (fun x y -> x < y);
}

(* ---- values: spec/protocol.md, section "Values" ---- *)

type json = Yojson.Safe.t

let member name : json -> json = function
  | `Assoc members -> List.assoc name members
  | _ -> failwith ("no object with " ^ name)

let text = function `String s -> s | _ -> failwith "text is missing"

let whole = function
  | `Int i -> Whole.of_int i
  | `Intlit s | `String s -> Whole.of_string s
  | _ -> failwith "an integer is missing"

(* The size of a list that is in memory. *)
let size_of json = Whole.to_int (whole json)

let real = function
  | `Float x -> x
  | `Int i -> float_of_int i
  | `String s -> float_of_string s
  | _ -> failwith "a float is missing"

let truth = function `Bool b -> b | _ -> failwith "a bool is missing"

let digit c = String.index "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/" c

let bytes_of_base64 s =
  let out = Buffer.create (String.length s) and held = ref 0 and bits = ref 0 in
  let add c =
    held := (!held lsl 6) lor digit c;
    bits := !bits + 6;
    if !bits >= 8 then begin
      bits := !bits - 8;
      Buffer.add_char out (Char.chr ((!held lsr !bits) land 255));
      held := !held land ((1 lsl !bits) - 1)
    end
  in
  String.iter (fun c -> if c <> '=' then add c) s;
  Buffer.contents out

(* One number from its bytes, little-endian, as the JSON that a list would have held. *)
let number dtype bytes i : json =
  match dtype with
  | "float64" -> `Float (Int64.float_of_bits (String.get_int64_le bytes (8 * i)))
  | "float32" -> `Float (Int32.float_of_bits (String.get_int32_le bytes (4 * i)))
  | "int64" -> `Intlit (Int64.to_string (String.get_int64_le bytes (8 * i)))
  | _ -> `Bool (bytes.[i] <> '\000')

(* Lists in lists, whichever way the array was written. *)
let rec nested shape leaf at : json =
  match shape with
  | [] -> leaf at
  | n :: rest ->
    let inner = List.fold_left ( * ) 1 rest in
    `List (List.init n (fun i -> nested rest leaf (at + (i * inner))))

let items json =
  match json with
  | `List items -> items
  | `Assoc _ ->
    let bytes = bytes_of_base64 (text (member "base64" json)) in
    let shape = match member "shape" json with `List sizes -> List.map size_of sizes | _ -> failwith "no shape" in
    (match nested shape (number (text (member "dtype" json)) bytes) 0 with `List items -> items | _ -> [])
  | _ -> failwith "an array is missing"

let wholes json = List.map whole (items json)
let reals json = List.map real (items json)
let truths json = List.map truth (items json)

let of_real x : json =
  `String (if Float.is_nan x then "nan" else if x = infinity then "inf" else if x = neg_infinity then "-inf"
           else Printf.sprintf "%h" x)

let exact = Whole.shift_left Whole.one 53
let of_whole i : json = if Whole.leq (Whole.abs i) exact then `Int (Whole.to_int i) else `String (Whole.to_string i)
let of_wholes l : json = `List (List.map of_whole l)
let of_reals l : json = `List (List.map of_real l)
let of_truths l : json = `List (List.map (fun b -> `Bool b) l)

(* Exact rationals: text, "7/4", "7", or an integer. *)
let fraction json =
  let of_ num den = if Whole.sign den > 0 then { qnum = num; qden = den } else failwith "a denominator is not positive" in
  match json with
  | `String s ->
    (match String.split_on_char '/' s with
     | [ p; q ] -> of_ (Whole.of_string p) (Whole.of_string q)
     | _ -> of_ (Whole.of_string s) Whole.one)
  | _ -> of_ (whole json) Whole.one

(* The rational that a float is. *)
let rational_of x =
  let mantissa, exponent = Float.frexp x in
  let num = Whole.of_float (Float.ldexp mantissa 53) and shift = exponent - 53 in
  if shift >= 0 then { qnum = Whole.shift_left num shift; qden = Whole.one }
  else { qnum = num; qden = Whole.shift_left Whole.one (-shift) }

(* ---- stages ---- *)

(* The rows of a neighbour array and of its weights, by position; padding is dropped by the model. *)
let rows start neighbours weights =
  let row n w = List.combine (wholes n) (reals w) in
  let table = Array.of_list (List.map2 row (items neighbours) (items weights)) in
  fun position ->
    let at = Whole.sub position start in
    if Whole.sign at < 0 || Whole.geq at (Whole.of_int (Array.length table)) then [] else table.(Whole.to_int at)

let crystal_trunks given =
  let found = member "coattention" given and parameters = member "parameters" given in
  let start = whole (member "start" found) in
  let near = rows start (member "intra" found) (member "intra_weight" found) in
  let far = rows start (member "cross" found) (member "cross_weight" found) in
  let tau = real (member "tau_merge" parameters) and largest = whole (member "T_max" parameters) in
  let sizes = trunks binary64 tau largest (stored_edges near far) start (truths (member "ends" given)) in
  let impact = List.map (trunk_impact binary64) (pieces sizes (reals (member "impact" given))) in
  `Assoc [ ("offsets", of_wholes (offsets start sizes)); ("impact", of_reals impact) ]

let rec pairs = function a :: (b :: _ as rest) -> (a, b) :: pairs rest | _ -> []
let sizes_of bounds = List.map (fun (a, b) -> Whole.sub b a) (pairs bounds)

let rec trunks_of starts parts scores strengths flags =
  match (starts, parts, scores, strengths, flags) with
  | start :: starts, members :: parts, score :: scores, strength :: strengths, safe :: flags ->
    { start; members; score; strength; safe } :: trunks_of starts parts scores strengths flags
  | _ -> []

let crystal_dissolve given =
  let bounds = wholes (member "offsets" (member "trunks" given)) in
  let parts = pieces (sizes_of bounds) (reals (member "impact" given)) in
  let of_ name = reals (member name given) in
  let all = trunks_of bounds parts (of_ "score") (of_ "D") (truths (member "protected" given)) in
  let least = whole (member "N_min" (member "parameters" given)) and budget = whole (member "budget" given) in
  let decided = stays binary64 least budget all in
  `Assoc
    [ ("kept", of_wholes (kept binary64 least budget all));
      ("ratio", of_reals (List.map (fun (g, k) -> ratio binary64 g k) decided));
      ("D", of_reals (List.map (fun (g, k) -> weakened binary64 g k) decided)) ]

(* Scores of the unprotected trunks, NaN elsewhere. *)
let rec spread flags found =
  match (flags, found) with
  | true :: flags, _ -> nan :: spread flags found
  | false :: flags, x :: found -> x :: spread flags found
  | _ -> []

let crystal_score given =
  let flags = truths (member "protected" given) and parameters = member "parameters" given in
  let alive name = List.filter_map (fun (x, safe) -> if safe then None else Some x) (List.combine (reals (member name given)) flags) in
  let epsilon = real (member "epsilon" parameters) and alpha = real (member "alpha" parameters) in
  of_reals (spread flags (scores binary64 epsilon alpha Float.log1p (alive "D") (alive "impact")))

(* What is chosen of each row, by its scores, its pinned tokens and its share. *)
let selection given choose =
  let score x = if Float.is_nan x then None else Some x in
  let row values flags share = choose (List.combine (List.map score (reals values)) (truths flags)) share in
  let rows name = items (member name given) in
  let chosen = List.map2 (fun (values, flags) -> row values flags) (List.combine (rows "values") (rows "pinned")) (wholes (member "shares" given)) in
  `Assoc
    [ ("positions", of_wholes (List.concat chosen)); ("offsets", of_wholes (offsets Whole.zero (List.map (fun l -> Whole.of_int (List.length l)) chosen))) ]

let best_tokens given =
  let unit_of i (value, pinned) = { first = Whole.of_int i; width = Whole.one; value; pinned } in
  selection given (fun tokens share -> selected binary64 share (List.mapi unit_of tokens))

let diversity_diverse given =
  let signatures = Array.of_list (List.map reals (items (member "V" given))) in
  let similarity i j = dot binary64 signatures.(Whole.to_int i) signatures.(Whole.to_int j) in
  let worth x = if Float.is_nan x then neg_infinity else x in
  let scores = List.map worth (reals (member "s" given)) in
  let lambda = real (member "lam" given) and k = whole (member "k" given) in
  of_wholes (diverse binary64 lambda similarity scores (truths (member "retained" given)) k)

(* ---- items that are no stage, in the form of spec/vectors ---- *)

let parameter given name = member name (member "parameters" given)
let named name value : json = `Assoc [ (name, value) ]

let protected_trunks given =
  let sink = whole (parameter given "N_sink") and recent = whole (parameter given "W_recent") in
  let safe (start, stop) = protected (whole (member "n" given)) sink recent start stop in
  named "protected" (of_truths (List.map safe (pairs (wholes (member "offsets" given)))))

let cut_of given =
  let flagged = List.combine (wholes (member "sizes" given)) (truths (member "protected" given)) in
  let tokens_of which = sum (List.filter_map (fun (size, safe) -> if safe = which then Some size else None) flagged) in
  named "c_0" (of_whole (cut (tokens_of true) (tokens_of false) (whole (member "B" given))))

let shares_that_stay given =
  let sizes = wholes (member "sizes" given) in
  let stays = allocate (whole (parameter given "N_min")) sizes (whole (member "c_0" given)) in
  named "r" (of_reals (List.map2 (fun k size -> binary64.over (binary64.of_Z k) (binary64.of_Z size)) stays sizes))

let keep_count_of given =
  let r = rational_of (real (member "r" given)) in
  named "k" (of_whole (keep_count r (whole (member "size" given)) (whole (parameter given "N_min"))))

let dissolved_D given = named "D" (of_reals (List.map2 binary64.times (reals (member "r" given)) (reals (member "D" given))))
let sentence_offsets given = named "offsets" (of_wholes (offsets Whole.zero (sentences Whole.zero (truths (member "ends" given)))))
let pair json = match wholes json with [ a; b ] -> (a, b) | _ -> failwith "a pair is missing"

let both_sides given =
  let current, stop = pair (member "current" given) and next, behind = pair (member "sentence" given) in
  (last5 current stop, first5 next behind)

let interface given =
  let ends side = of_wholes [ List.hd side; Whole.succ (List.hd (List.rev side)) ] in
  let last, first = both_sides given in
  `Assoc [ ("last5", ends last); ("first5", ends first) ]

let edges_between given =
  let edge json = match items json with [ a; b; w ] -> (whole a, (whole b, real w)) | _ -> failwith "an edge is missing" in
  let edges = List.map edge (items (member "edges" given)) in
  let near a = List.filter_map (fun (first, rest) -> if Whole.equal first a then Some rest else None) edges in
  let last, first = both_sides given in
  named "weights" (of_reals (interface_edges (stored_edges near (fun _ -> [])) last first))

let merged given =
  let tau = real (parameter given "tau_merge") and largest = whole (parameter given "T_max") in
  let weights = reals (member "weights" given) in
  named "merges" (`Bool (merges binary64 tau largest weights (whole (member "size" given)) (whole (member "next_size" given))))

let pieces_of given = named "sizes" (of_wholes (split (whole (member "T_max" given)) (whole (member "size" given))))

let budget_as given name asked =
  match parse (text (member "budget" given)) with None -> `Null | Some budget -> named name (of_whole (asked budget))

let budget_tokens given = budget_as given "tokens" (fun budget -> tokens budget (whole (member "seen" given)))

let effective_budget given =
  let sink = whole (parameter given "N_sink") and recent = whole (parameter given "W_recent") in
  budget_as given "B" (fun budget -> effective budget (whole (member "n" given)) sink recent)

let path_scores given =
  let alpha = real (parameter given "alpha") in
  let score d x = if Float.is_nan x then nan else best_path binary64 alpha d x in
  named "score" (of_reals (List.map2 score (reals (member "D" given)) (reals (member "M_tilde" given))))

(* Units of any number of tokens, all rows alike. *)
let units given =
  let bounds = pairs (wholes (member "offsets" given)) and flags = truths (member "pinned" given) in
  let unit_of (start, stop) (x, pinned) =
    { first = start; width = Whole.sub stop start; value = (if Float.is_nan x then None else Some x); pinned } in
  let row values = List.map2 unit_of bounds (List.combine (reals values) flags) in
  let chosen values = of_wholes (selected binary64 (whole (member "B" given)) (row values)) in
  named "kept" (`List (List.map chosen (items (member "values" given))))

let blocks given = selection given (best_blocks binary64 (whole (member "b" given)))

let cosines given =
  let rows = List.map reals (items (member "V" given)) in
  named "cosines" (`List (List.map (fun u -> of_reals (List.map (dot binary64 u) rows)) rows))

let shares given = named "shares" (of_wholes (whole_shares (List.map fraction (items (member "targets" given)))))

let pyramid_shares given =
  let layers = whole (member "L" given) and window = Whole.min (whole (member "W" given)) (whole (member "n" given)) in
  let beyond name = { qnum = Whole.sub (whole (member name given)) window; qden = Whole.one } in
  let line = pyramid (beyond "B") (beyond "n") (fraction (member "beta" given)) layers in
  let with_window q = { q with qnum = Whole.add q.qnum (Whole.mul window q.qden) } in
  named "shares" (of_wholes (whole_shares (List.map with_window line)))

(* ---- requests ---- *)

let operations =
  [ ("crystal.trunks", crystal_trunks); ("crystal.dissolve", crystal_dissolve); ("crystal.score", crystal_score);
    ("policies.best_tokens", best_tokens); ("diversity.diverse", diversity_diverse);
    ("CC-BUDGET-FORMS", budget_tokens); ("CC-BUDGET", effective_budget); ("CC-PROTECTED", protected_trunks);
    ("CC-CUT", cut_of); ("CC-ALLOCATE", shares_that_stay); ("CC-KEEP-COUNT", keep_count_of);
    ("CC-DISSOLVE-D", dissolved_D); ("CC-SENTENCES", sentence_offsets); ("CC-INTERFACE", interface);
    ("CC-INTERFACE-EDGES", edges_between); ("CC-MERGE", merged); ("CC-SPLIT", pieces_of); ("CC-SCORE", path_scores);
    ("PO-TOP-UNITS", units); ("PO-BEST-BLOCKS", blocks); ("PO-WHOLE-SHARES", shares);
    ("PO-PYRAMID-BUDGET", pyramid_shares); ("DV-COSINE", cosines) ]

(* A line that is no request gets an answer too: an error, with the id that it has, if any. *)
let answer line =
  let id, said =
    try
      let request = Yojson.Safe.from_string line in
      let id = try member "id" request with _ -> `Null in
      let run () =
        let op = text (member "op" request) in
        match List.assoc_opt op operations with
        | Some run -> run (member "arguments" request)
        | None -> failwith ("no operation " ^ op)
      in
      (id, try ("result", run ()) with error -> ("error", `String (Printexc.to_string error)))
    with error -> (`Null, ("error", `String (Printexc.to_string error)))
  in
  Yojson.Safe.to_string (`Assoc [ ("id", id); said ])

let () =
  try
    while true do
      print_endline (answer (input_line stdin))
    done
  with End_of_file -> ()
