(* The extracted model as an engine of spec/protocol.md, for the stages that it has; engine.py offers whole families.
   Only this file and OCaml's arithmetic on floats stand between the model and its requests. *)
open Model

let binary64 = {
  zero = 0.; plus = ( +. ); minus = ( -. ); times = ( *. ); over = ( /. ); of_Z = float_of_int; ltb = (fun x y -> x < y);
}

(* ---- values: spec/protocol.md, section "Values" ---- *)

type json = Yojson.Safe.t

let member name : json -> json = function
  | `Assoc members -> List.assoc name members
  | _ -> failwith ("no object with " ^ name)

let text = function `String s -> s | _ -> failwith "text is missing"

(* An integer that is larger than OCaml's largest stands for a budget, which may as well be the largest. *)
let whole = function
  | `Int i -> i
  | `Intlit s | `String s -> (match int_of_string_opt s with Some i -> i | None -> if s.[0] = '-' then min_int else max_int)
  | _ -> failwith "an integer is missing"

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
  | "int64" -> `Int (Int64.to_int (String.get_int64_le bytes (8 * i)))
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
    let shape = match member "shape" json with `List sizes -> List.map whole sizes | _ -> failwith "no shape" in
    (match nested shape (number (text (member "dtype" json)) bytes) 0 with `List items -> items | _ -> [])
  | _ -> failwith "an array is missing"

let wholes json = List.map whole (items json)
let reals json = List.map real (items json)
let truths json = List.map truth (items json)

let of_real x : json =
  `String (if Float.is_nan x then "nan" else if x = infinity then "inf" else if x = neg_infinity then "-inf"
           else Printf.sprintf "%h" x)

let of_wholes l : json = `List (List.map (fun i -> if abs i <= 1 lsl 53 then `Int i else `String (string_of_int i)) l)
let of_reals l : json = `List (List.map of_real l)

(* Exact rationals as text, "7/4". *)
let fraction json =
  match String.split_on_char '/' (text json) with
  | [ p; q ] -> { qnum = int_of_string p; qden = int_of_string q }
  | _ -> failwith "a fraction is missing"

let of_fraction q : json = `String (Printf.sprintf "%d/%d" q.qnum q.qden)

(* ---- stages ---- *)

(* The rows of a neighbour array and of its weights, by position; padding is dropped by the model. *)
let rows start neighbours weights =
  let row n w = List.combine (wholes n) (reals w) in
  let table = Array.of_list (List.map2 row (items neighbours) (items weights)) in
  fun position -> if position < start || position >= start + Array.length table then [] else table.(position - start)

let crystal_trunks given =
  let found = member "coattention" given and parameters = member "parameters" given in
  let start = whole (member "start" found) in
  let near = rows start (member "intra" found) (member "intra_weight" found) in
  let far = rows start (member "cross" found) (member "cross_weight" found) in
  let tau = real (member "tau_merge" parameters) and largest = whole (member "T_max" parameters) in
  let sizes = trunks binary64 tau largest (stored_edges near far) start (truths (member "ends" given)) in
  let impact = List.map (trunk_impact binary64) (pieces sizes (reals (member "impact" given))) in
  `Assoc [ ("offsets", of_wholes (offsets start sizes)); ("impact", of_reals impact) ]

let rec sizes_of = function a :: (b :: _ as rest) -> (b - a) :: sizes_of rest | _ -> []

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
    [ ("positions", of_wholes (List.concat chosen)); ("offsets", of_wholes (offsets 0 (List.map List.length chosen))) ]

let best_tokens given =
  let unit_of i (value, pinned) = { first = i; width = 1; value; pinned } in
  selection given (fun tokens share -> selected binary64 share (List.mapi unit_of tokens))

let diversity_diverse given =
  let signatures = Array.of_list (List.map reals (items (member "V" given))) in
  let similarity i j = dot binary64 signatures.(i) signatures.(j) in
  let worth x = if Float.is_nan x then neg_infinity else x in
  let scores = List.map worth (reals (member "s" given)) in
  let lambda = real (member "lam" given) and k = whole (member "k" given) in
  of_wholes (diverse binary64 lambda similarity scores (truths (member "retained" given)) k)

(* ---- items that are no stage ---- *)

let budget_tokens given =
  let seen = whole (member "seen" given) in
  match parse (text (member "text" given)) with None -> `Null | Some asked -> `Int (tokens asked seen)

let blocks given = selection given (best_blocks binary64 (whole (member "b" given)))

let shares given = of_wholes (whole_shares (List.map fraction (items (member "targets" given))))

let pyramid_line given =
  let of_ name = fraction (member name given) in
  `List (List.map of_fraction (pyramid (of_ "base") (of_ "past") (of_ "beta") (whole (member "L" given))))

(* ---- requests ---- *)

let operations =
  [ ("crystal.trunks", crystal_trunks); ("crystal.dissolve", crystal_dissolve); ("crystal.score", crystal_score);
    ("policies.best_tokens", best_tokens); ("diversity.diverse", diversity_diverse);
    ("CC-BUDGET-FORMS", budget_tokens); ("PO-BEST-BLOCKS", blocks); ("PO-WHOLE-SHARES", shares);
    ("PO-PYRAMID-BUDGET", pyramid_line) ]

let answer line =
  let request = Yojson.Safe.from_string line in
  let said =
    try ("result", List.assoc (text (member "op" request)) operations (member "arguments" request))
    with error -> ("error", `String (Printexc.to_string error))
  in
  Yojson.Safe.to_string (`Assoc [ ("id", member "id" request); said ])

let () =
  try
    while true do
      print_endline (answer (input_line stdin))
    done
  with End_of_file -> ()
