//! TOML, as far as manifests and the lists of the checks use it: tables, and keys with values on one or several lines.

/// A table, with its entries in their order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    /// Name in brackets, for example `package` or `test` of `[[test]]`; empty at the top of a file.
    pub(crate) name: String,
    /// Comment lines directly above the header or above an entry, without `#`.
    pub(crate) comments: Vec<String>,
    /// Keys with their values as written.
    pub(crate) entries: Vec<(String, String)>,
}

impl Table {
    /// Returns the value of a key as written.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.entries.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Returns the string of a key.
    pub(crate) fn text(&self, key: &str) -> Option<String> {
        string(self.get(key)?)
    }
}

/// Returns the tables of a text.
pub(crate) fn tables(text: &str) -> Vec<Table> {
    let mut tables = vec![Table::default()];
    let mut comments = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let line = line.trim();
        if let Some(comment) = line.strip_prefix('#') {
            comments.push(comment.trim().to_owned());
            continue;
        }
        let comments = std::mem::take(&mut comments);
        if line.starts_with('[') {
            let name = without_comment(line).trim_matches(['[', ']', ' ']).to_owned();
            tables.push(Table { name, comments, entries: Vec::new() });
        } else if let Some((key, first)) = split_entry(line) {
            let mut value = without_comment(first).to_owned();
            while value.starts_with(['[', '{']) && depth(&value) > 0 {
                let Some(next) = lines.next() else { break };
                value.push(' ');
                value.push_str(without_comment(next.trim()));
            }
            let table = tables.last_mut().expect("there is a first table");
            table.comments.extend(comments);
            table.entries.push((key, value));
        }
    }
    tables
}

/// Returns the content of a basic or literal string.
pub(crate) fn string(value: &str) -> Option<String> {
    let value = value.trim();
    if let Some(literal) = value.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\'')) {
        return Some(literal.to_owned());
    }
    let escaped = value.strip_prefix('"')?.strip_suffix('"')?;
    let (mut text, mut characters) = (String::new(), escaped.chars());
    while let Some(character) = characters.next() {
        text.push(match character {
            '\\' => match characters.next()? {
                'n' => '\n',
                't' => '\t',
                other @ ('"' | '\\') => other,
                _ => return None,
            },
            other => other,
        });
    }
    Some(text)
}

fn split_entry(line: &str) -> Option<(String, &str)> {
    let (key, value) = match line.strip_prefix('"') {
        Some(quoted) => {
            let (key, rest) = quoted.split_once('"')?;
            (key, rest.trim_start().strip_prefix('=')?)
        }
        None => line.split_once('=')?,
    };
    Some((key.trim().to_owned(), value.trim()))
}

/// Returns how many brackets of a value are open.
fn depth(value: &str) -> i32 {
    let mut quote = None;
    let mut open = 0;
    for character in value.chars() {
        match (quote, character) {
            (Some(end), _) if end == character => quote = None,
            (None, '"' | '\'') => quote = Some(character),
            (None, '[' | '{') => open += 1,
            (None, ']' | '}') => open -= 1,
            _ => {}
        }
    }
    open
}

fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (index, character) in line.char_indices() {
        match (quote, character) {
            (Some(end), _) if end == character => quote = None,
            (None, '"' | '\'') => quote = Some(character),
            (None, '#') => return line[..index].trim_end(),
            _ => {}
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_tables_comments_strings_and_arrays() {
        let text = "[package]\nname = \"a\" # the name\n\n# Needs its own process.\n[[test]]\nname = 'b#'\n\
                    [x]\n\"c.d[]\" = \"e \\\"f\\\"\"\nlist = [\n  \"g\", # h\n  \"i\",\n]\nj.workspace = true\n";
        let tables = tables(text);
        assert_eq!(tables[1].text("name").as_deref(), Some("a"));
        assert_eq!((tables[2].name.as_str(), tables[2].text("name").as_deref()), ("test", Some("b#")));
        assert_eq!(tables[2].comments, ["Needs its own process."]);
        assert_eq!(tables[3].text("c.d[]").as_deref(), Some("e \"f\""));
        assert_eq!(tables[3].get("list"), Some("[ \"g\", \"i\", ]"));
        assert_eq!(tables[3].get("j.workspace"), Some("true"));
    }
}
