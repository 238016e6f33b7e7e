//! Files of users: nodes, parts and models that expressions name by their paths.
//!
//! A name with a slash, or with the ending `.toml`, is a path. Callers read the files ([`ProfileFiles::paths`]); this module
//! has no I/O.
//!
//! ```text
//! h100+ssd.toml     built-in accelerator; the tables [link], [memory], [device], [network], [cold] of the file replace parts
//! measured.toml     the file has an [accelerator], as `reprise profile --vllm` writes it
//! ```

use std::collections::BTreeMap;

use super::node::PartsFile;
use super::{Hardware, KINDS, Model, Part, Place, ProfileError, find, parse, unknown};

/// Kind of the parts that are NVMe devices.
const DEVICE: usize = 3;

/// Texts of the files that expressions name.
#[derive(Clone, Debug, Default)]
pub struct ProfileFiles {
    texts: BTreeMap<String, String>,
}

/// Elements of an expression.
#[derive(Debug)]
struct Elements<'a> {
    first: PartsFile<'a>,
    /// Parts that the other elements name, with their kinds.
    chosen: Vec<(usize, Part)>,
}

impl ProfileFiles {
    /// Paths in an expression of hardware, or in the name of a model.
    pub fn paths(expression: &str) -> Vec<&str> {
        expression.split('+').map(str::trim).filter(|name| is_path(name)).collect()
    }

    /// Adds the text of a file by its path.
    pub fn add(&mut self, path: &str, text: String) {
        self.texts.insert(path.to_owned(), text);
    }

    /// Returns the node of an expression: an accelerator, then parts that replace its usual ones.
    ///
    /// # Errors
    /// An element is unknown, or a file is not valid: the message names the known elements, or the line.
    pub fn hardware(&self, expression: &str) -> Result<Hardware, ProfileError> {
        let Elements { first, chosen } = self.elements(expression)?;
        first.assemble(expression, &chosen)
    }

    /// Returns the node of an expression with each of the devices that it names, or with each built-in one.
    ///
    /// # Errors
    /// Those of [`ProfileFiles::hardware`].
    pub fn with_devices(&self, expression: &str) -> Result<Vec<Hardware>, ProfileError> {
        let Elements { first, chosen } = self.elements(expression)?;
        let own = first.parts[DEVICE - 1].iter().cloned();
        let named = chosen.iter().filter(|(kind, _)| *kind == DEVICE).map(|(_, part)| part.clone());
        let mut devices: Vec<Part> = named.collect();
        if devices.is_empty() {
            devices.extend(own);
        }
        if devices.is_empty() {
            let files = single_drives();
            devices = files.map(|(_, path, text)| parse(DEVICE, path, text)).collect::<Result<_, _>>()?;
        }
        let with = |device: Part| {
            let chosen: Vec<(usize, Part)> = chosen.iter().cloned().chain([(DEVICE, device)]).collect();
            first.assemble(expression, &chosen)
        };
        devices.into_iter().map(with).collect()
    }

    /// Returns a built-in model, or the one of a file: a model, or a node with one.
    ///
    /// # Errors
    /// The name is unknown, or the file is not valid: the message names the known models, or the line.
    pub fn model(&self, name: &str) -> Result<Model, ProfileError> {
        let name = name.trim();
        if !is_path(name) {
            return Model::named(name);
        }
        let place = self.place(name)?;
        // Files of nodes have tables only, files of models begin with fields.
        let tables = ["[accelerator]", "[link]", "[memory]", "[device]", "[network]", "[cold]", "[model]"];
        let is_node = place.text.lines().any(|line| tables.contains(&line.trim()));
        if !is_node {
            return Model::parse(place.path, place.text);
        }
        let model = PartsFile::parse(place)?.model;
        model.ok_or_else(|| ProfileError(format!("{name}: no [model]: add the table, or name a model")))
    }

    fn elements<'a>(&'a self, expression: &'a str) -> Result<Elements<'a>, ProfileError> {
        let names: Vec<&str> = expression.split('+').map(str::trim).collect();
        let first = self.first(names[0])?;
        let mut chosen = Vec::new();
        for name in &names[1..] {
            chosen.extend(self.parts(name)?);
        }
        Ok(Elements { first, chosen })
    }

    fn first<'a>(&'a self, name: &str) -> Result<PartsFile<'a>, ProfileError> {
        if is_path(name) {
            let place = self.place(name)?;
            let file = PartsFile::parse(place)?;
            if file.accelerator.is_none() {
                return Err(ProfileError(format!(
                    "{name}: no [accelerator]: add the table, or name an accelerator first, as h100+{name}"
                )));
            }
            return Ok(file);
        }
        let file = find(0, name).ok_or_else(|| unknown("accelerator", name, 0))?;
        let accelerator = Some(parse(0, file.1, file.2)?);
        Ok(PartsFile { path: file.1, accelerator, parts: Default::default(), model: None })
    }

    /// Parts of an element behind the first one, with their kinds.
    fn parts(&self, name: &str) -> Result<Vec<(usize, Part)>, ProfileError> {
        if is_path(name) {
            let file = PartsFile::parse(self.place(name)?)?;
            if file.accelerator.is_some() {
                return Err(ProfileError(format!(
                    "{name}: has an [accelerator], but follows one: name {name} first, or remove the table"
                )));
            }
            let parts =
                (1..).zip(file.parts).filter_map(|(kind, part)| Some((kind, part?))).collect::<Vec<_>>();
            if parts.is_empty() {
                let tables = "[link], [memory], [device], [network] or [cold]";
                return Err(ProfileError(format!("{name}: no part of a node: add {tables}")));
            }
            return Ok(parts);
        }
        let found = (1..KINDS.len()).find_map(|kind| Some((kind, find(kind, name)?)));
        let (kind, file) = found.ok_or_else(|| unknown("part", name, KINDS.len()))?;
        Ok(vec![(kind, parse(kind, file.1, file.2)?)])
    }

    fn place<'a>(&'a self, path: &str) -> Result<Place<'a>, ProfileError> {
        let found = self.texts.get_key_value(path);
        let (path, text) = found.ok_or_else(|| ProfileError(format!("{path}: the file was not read")))?;
        Ok(Place { path, text })
    }
}

fn is_path(name: &str) -> bool {
    name.contains('/') || name.ends_with(".toml")
}

/// Files of one drive: a set of drives such as `ps1010x2` is a number of another class.
fn single_drives() -> impl Iterator<Item = &'static super::File> {
    let files = KINDS[DEVICE].1;
    let is_set = |name: &str| {
        files.iter().any(|other| name.strip_prefix(other.0).is_some_and(|rest| rest.starts_with('x')))
    };
    files.iter().filter(move |file| !is_set(file.0))
}

#[cfg(test)]
mod tests {
    use super::super::{ACCELERATORS, DEVICES, MODELS};
    use super::*;

    /// A part or model as a table of a node's file.
    fn table(name: &str, text: &str) -> String {
        let nested = text.replace("[figures.", &format!("[{name}.figures."));
        format!("[{name}]\n{}\n", nested.replace("[layout]", &format!("[{name}.layout]")))
    }

    fn files(all: &[(&str, String)]) -> ProfileFiles {
        let mut files = ProfileFiles::default();
        all.iter().for_each(|(path, text)| files.add(path, text.clone()));
        files
    }

    fn ssd() -> String {
        table("device", DEVICES[1].2).replacen("\"ps1010\"", "\"mine\"", 1).replacen(
            "value = 7.68",
            "value = 3.84",
            1,
        )
    }

    #[test]
    fn files_are_first_elements_parts_and_models_of_expressions() {
        let node = table("accelerator", ACCELERATORS[0].2) + &ssd() + &table("model", MODELS[0].2);
        let files = files(&[
            ("a/node.toml", node),
            ("ssd.toml", ssd()),
            ("m.toml", MODELS[0].2.replace("llama-3-8b", "mine")),
        ]);
        assert_eq!(ProfileFiles::paths("h100 + ssd.toml+a/node.toml"), ["ssd.toml", "a/node.toml"]);
        let usual = Hardware::named("h100").expect("valid");
        for expression in ["a/node.toml", "h100+ssd.toml"] {
            let hardware = files.hardware(expression).expect(expression);
            assert_eq!((hardware.nvme_bytes, hardware.link), (3_840_000_000_000, usual.link), "{expression}");
            let devices = files.with_devices(expression).expect(expression);
            let names: Vec<&str> = devices.iter().map(|device| device.nvme_name.as_str()).collect();
            assert_eq!(names, ["mine"], "{expression}");
        }
        // Parts of the expression replace those of the file.
        assert_eq!(files.hardware("a/node.toml+gen4").expect("valid").nvme_bytes, usual.nvme_bytes);
        assert_eq!(files.with_devices("h100").expect("valid").len(), 2);
        assert_eq!(files.model("m.toml").expect("valid").name, "mine");
        assert_eq!(files.model("a/node.toml").expect("valid"), Model::named("llama-3-8b").expect("valid"));
    }

    #[test]
    fn invalid_files_name_the_line_and_the_remedy() {
        let part = "[device]\nname = \"d\"\ntitle = \"D\"\n[device.figures.capacity_tb]\nvalue = -3\nsource = \"s\"\n";
        let files = files(&[
            ("part.toml", part.to_owned()),
            ("ssd.toml", ssd()),
            ("typo.toml", part.replace("value", "valeu")),
            ("model.toml", MODELS[0].2.replace("kv_heads = 8", "kv_heads = 0")),
            ("heads.toml", MODELS[0].2.replace("query_heads = 32", "query_heads = 0")),
            ("cut.toml", MODELS[0].2[..MODELS[0].2.find("[layout]").expect("a layout")].to_owned()),
            ("node.toml", table("accelerator", ACCELERATORS[0].2)),
            ("empty.toml", String::new()),
        ]);
        for (expression, words) in [
            ("h100+part.toml", ["part.toml: line 5: ", "impossible capacity_tb -3"]),
            ("h100+typo.toml", ["typo.toml", "line 5"]),
            ("ssd.toml", ["no [accelerator]", "h100+ssd.toml"]),
            ("h100+node.toml", ["node.toml", "name node.toml first"]),
            ("h100+empty.toml", ["empty.toml", "[device]"]),
            ("h100+floppy", ["'floppy'", "NODE.toml"]),
        ] {
            let error = files.hardware(expression).expect_err(expression).to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{expression}: {error}");
        }
        for (name, words) in [
            ("model.toml", ["model.toml: line 13: ", "at least 1: correct [layout]"]),
            ("heads.toml", ["heads.toml: line 8: ", "impossible query_heads 0"]),
            ("cut.toml", ["cut.toml", "config.json"]),
            ("node.toml", ["node.toml", "[model]"]),
        ] {
            let error = files.model(name).expect_err(name).to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{name}: {error}");
        }
    }
}
