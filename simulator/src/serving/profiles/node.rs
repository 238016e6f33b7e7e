//! Profile of a node in one file: its accelerator, the parts that were measured, and the model.
//!
//! `reprise profile --vllm` writes such a file. Parts that it lacks are the usual ones of the accelerator. Each table is
//! optional where an expression needs the others only, as in `h100+ssd.toml`.
//!
//! ```toml
//! [accelerator]
//! name = "measured"
//! title = "vLLM on 2 cores"
//! parts = ["local", "ddr5", "gen4", "tcp", "object"]
//! [accelerator.figures.memory_gb]
//! value = 24
//! source = "MemTotal"
//! [link]          # also memory, device, network, cold
//! [model]         # as in simulator/profiles/models/
//! ```

use serde::Deserialize;

use super::model::ModelFile;
use super::{Hardware, KINDS, Model, Part, Place, ProfileError, built_in, check};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeFile {
    accelerator: Option<Part>,
    link: Option<Part>,
    memory: Option<Part>,
    device: Option<Part>,
    network: Option<Part>,
    cold: Option<Part>,
    model: Option<ModelFile>,
}

/// Parts of a node in one file, checked; each may be absent.
#[derive(Clone, Debug)]
pub(super) struct PartsFile<'a> {
    pub(super) path: &'a str,
    pub(super) accelerator: Option<Part>,
    /// Those of the kinds behind the accelerator, in their order.
    pub(super) parts: [Option<Part>; 5],
    pub(super) model: Option<Model>,
}

/// Hardware of a node and the model that it serves.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeProfile {
    /// Hardware of the node.
    pub hardware: Hardware,
    /// Model of its engine.
    pub model: Model,
}

impl NodeProfile {
    /// Parses and checks a file; errors name the file, the line and the field.
    pub fn parse(path: &str, text: &str) -> Result<NodeProfile, ProfileError> {
        let file = PartsFile::parse(Place { path, text })?;
        let missing = |table: &str| {
            ProfileError(format!(
                "{path}: no [{table}]: a node has an accelerator and a model; `reprise profile --vllm` writes both"
            ))
        };
        let model = file.model.clone().ok_or_else(|| missing("model"))?;
        let name = file.accelerator.as_ref().ok_or_else(|| missing("accelerator"))?.name.get_ref().clone();
        Ok(NodeProfile { hardware: file.assemble(&name, &[])?, model })
    }
}

impl<'a> PartsFile<'a> {
    /// Parses and checks all tables of a file.
    pub(super) fn parse(place: Place<'a>) -> Result<PartsFile<'a>, ProfileError> {
        let Place { path, text } = place;
        let file: NodeFile = toml::from_str(text).map_err(|error| {
            ProfileError(format!(
                "{path}: invalid profile of a node: {}; write the tables as in docs/SIMULATOR.md",
                error.to_string().trim()
            ))
        })?;
        let NodeFile { accelerator, link, memory, device, network, cold, model } = file;
        let parts = [link, memory, device, network, cold];
        if let Some(part) = &accelerator {
            check(0, place, part)?;
        }
        for (kind, part) in (1..).zip(&parts) {
            part.as_ref().map_or(Ok(()), |part| check(kind, place, part))?;
        }
        let model = model.map(|model| Model::of_file(place, model)).transpose()?;
        Ok(PartsFile { path, accelerator, parts, model })
    }

    /// Node of the file's accelerator. Its parts are the last chosen ones of their kinds, those of the file, or the usual
    /// ones of the accelerator, in this order.
    pub(super) fn assemble(
        &self,
        expression: &str,
        chosen: &[(usize, Part)],
    ) -> Result<Hardware, ProfileError> {
        let accelerator = self.accelerator.clone().ok_or_else(|| {
            ProfileError(format!("{}: no [accelerator]: name an accelerator before this file", self.path))
        })?;
        let usual = accelerator.parts.clone();
        let mut parts = vec![accelerator];
        for kind in 1..KINDS.len() {
            let last = chosen.iter().rev().find(|(of, _)| *of == kind).map(|(_, part)| part);
            let part = match (last.or(self.parts[kind - 1].as_ref()), usual.get(kind - 1)) {
                (Some(part), _) => part.clone(),
                (None, Some(name)) => built_in(kind, self.path, name)?,
                (None, None) => continue,
            };
            parts.push(part);
        }
        Hardware::of_kinds(expression, self.path, parts)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ACCELERATORS, LINKS, MODELS};
    use super::*;

    /// A part or model as a table of a node's file.
    fn table(name: &str, text: &str) -> String {
        let nested = text.replace("[figures.", &format!("[{name}.figures."));
        format!("[{name}]\n{}\n", nested.replace("[layout]", &format!("[{name}.layout]")))
    }

    fn node() -> String {
        let link = LINKS[2].2.replacen("value = ", "value = 1", 1);
        [table("accelerator", ACCELERATORS[3].2), table("link", &link), table("model", MODELS[0].2)].concat()
    }

    #[test]
    fn measured_parts_replace_the_usual_ones_of_the_accelerator() {
        let node = NodeProfile::parse("n.toml", &node()).expect("valid");
        let usual = Hardware::named("cpu").expect("valid");
        assert_eq!(node.model, Model::named("llama-3-8b").expect("valid"));
        assert_eq!((&node.hardware.nvme_read, &node.hardware.hbm), (&usual.nvme_read, &usual.hbm));
        assert_eq!(
            [usual.link, node.hardware.link].map(|link| link.bytes_per_second / 1_000_000_000),
            [17, 117]
        );
    }

    #[test]
    fn impossible_figures_and_missing_models_name_the_file() {
        let impossible = node().replacen("memory_gb_per_s]\nvalue = 20", "memory_gb_per_s]\nvalue = 0.2", 1);
        let error = NodeProfile::parse("n.toml", &impossible).expect_err("refused").to_string();
        assert!(
            error.contains("n.toml: line ") && error.contains("impossible memory_gb_per_s 0.2"),
            "{error}"
        );
        let cut = &node()[..node().find("[model]").expect("a model")];
        let error = NodeProfile::parse("n.toml", cut).expect_err("refused").to_string();
        assert!(error.contains("n.toml") && error.contains("model"), "{error}");
    }
}
