//! The keys of a workload file. One definition of a table gives the struct that the parser fills, its defaults, and the
//! [`SpecKey`]s that `zernel workload list` and `docs/workload.md` show.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// One key of a table in a workload file, for the documentation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SpecKey {
    /// The name of the key.
    pub name: &'static str,
    /// The name of the type that the key's value has.
    #[serde(rename = "type")]
    pub kind: String,
    /// The value of an absent key in TOML, or `required`, or `not set`.
    pub default: String,
    /// What the key sets.
    pub meaning: String,
    /// The values to choose from, if the type of the key is a choice.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<SpecChoice>,
}

/// One value of a key whose type is a choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SpecChoice {
    /// The value as it is written in TOML, with the name of a type where a parameter goes.
    pub value: String,
    /// What the workload does with this value.
    pub meaning: String,
    /// The keys of the table that belongs to this value, if it has one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<SpecKey>,
}

/// A type that the value of a key in a workload file can have.
pub(crate) trait SpecValue {
    /// The name of the type in the documentation.
    fn value_type_name() -> String;

    /// The values that a user chooses from, for a type that is a choice.
    fn choices() -> Vec<SpecChoice> {
        Vec::new()
    }

    /// The keys of the table, for a type that is a table.
    fn keys() -> Vec<SpecKey> {
        Vec::new()
    }

    /// Makes the relative paths in this value start at `folder`.
    fn resolve_paths(&mut self, _folder: &Path) {}
}

macro_rules! scalar_spec_values {
    ($($type:ty: $kind:literal,)*) => {
        $(impl SpecValue for $type {
            fn value_type_name() -> String {
                $kind.to_owned()
            }
        })*
    };
}

scalar_spec_values! {
    bool: "boolean",
    i32: "integer",
    u32: "integer",
    u64: "integer",
    usize: "integer",
    String: "string",
}

impl SpecValue for PathBuf {
    fn value_type_name() -> String {
        "path".to_owned()
    }

    fn resolve_paths(&mut self, folder: &Path) {
        // `Path::join` with an absolute path returns that path, so absolute paths stay as they are.
        *self = folder.join(&*self);
    }
}

impl<T: SpecValue> SpecValue for Option<T> {
    fn value_type_name() -> String {
        T::value_type_name()
    }

    fn choices() -> Vec<SpecChoice> {
        T::choices()
    }

    fn resolve_paths(&mut self, folder: &Path) {
        self.iter_mut()
            .for_each(|value| value.resolve_paths(folder));
    }
}

impl<T: SpecValue> SpecValue for Vec<T> {
    fn value_type_name() -> String {
        array_type_name(&T::value_type_name())
    }

    fn choices() -> Vec<SpecChoice> {
        T::choices()
    }

    fn resolve_paths(&mut self, folder: &Path) {
        self.iter_mut()
            .for_each(|value| value.resolve_paths(folder));
    }
}

impl<T: SpecValue> SpecValue for BTreeSet<T> {
    fn value_type_name() -> String {
        array_type_name(&T::value_type_name())
    }
}

fn array_type_name(kind: &str) -> String {
    match kind.strip_prefix("array ") {
        Some(rest) => format!("array of arrays {rest}"),
        None => format!("array of {kind}s"),
    }
}

/// A default value as TOML text. TOML has no null: an option without a value is a key that is not set.
pub(crate) fn default_text(value: &impl Serialize) -> String {
    toml::Value::try_from(value).map_or_else(|_| "not set".to_owned(), |value| value.to_string())
}

/// The lines of a doc comment, joined to one line.
pub(crate) fn join_doc_lines(lines: &[&str]) -> String {
    let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
    lines.join(" ")
}

/// The name that serde's `snake_case` gives an enum variant.
pub(crate) fn snake_case(variant: &str) -> String {
    let mut name = String::new();
    for letter in variant.chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_lowercase());
    }
    name
}

/// A value of a choice as it is written in TOML: its name alone, with one parameter, or with a table of `keys`.
pub(crate) fn choice_value(variant: &str, payload: Option<String>, keys: &[SpecKey]) -> String {
    let name = snake_case(variant);
    if let Some(kind) = payload {
        return format!("{{ {name} = {kind} }}");
    }
    if keys.is_empty() {
        return format!("\"{name}\"");
    }
    let keys: Vec<String> = keys
        .iter()
        .map(|key| format!("{} = {}", key.name, key.kind))
        .collect();
    format!("{{ {name} = {{ {} }} }}", keys.join(", "))
}

/// The first element of an array. The macros pass an optional value, if it is given, followed by the default value.
pub(crate) fn first_element<T, const LENGTH: usize>(list: [T; LENGTH]) -> T {
    list.into_iter()
        .next()
        .expect("the macro adds a last element")
}

/// Defines a table of a workload file: each field with its meaning as doc comment, its type and its default. `field as
/// "key"` gives the key another name than the field. `shown as "text"` replaces the default in the documentation where
/// the default depends on the machine.
macro_rules! spec_table {
    (
        $(#[$attribute:meta])*
        pub struct $name:ident {
            $(
                $(#[doc = $meaning:literal])+
                pub $field:ident $(as $key:literal)?: $type:ty = $default:expr,
                $(shown as $shown:literal,)?
            )*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $(
                $(#[doc = $meaning])+
                $(#[serde(rename = $key)])?
                pub $field: $type,
            )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $crate::spec_keys::SpecValue for $name {
            fn value_type_name() -> String {
                "table".to_owned()
            }

            fn keys() -> Vec<$crate::spec_keys::SpecKey> {
                use $crate::spec_keys;
                let defaults = Self::default();
                vec![$(spec_keys::SpecKey {
                    name: spec_keys::first_element([$($key,)? stringify!($field)]),
                    kind: <$type as spec_keys::SpecValue>::value_type_name(),
                    default: spec_keys::first_element([$($shown.to_owned(),)? spec_keys::default_text(&defaults.$field)]),
                    meaning: spec_keys::join_doc_lines(&[$($meaning),+]),
                    choices: <$type as spec_keys::SpecValue>::choices(),
                },)*]
            }

            fn resolve_paths(&mut self, folder: &std::path::Path) {
                $($crate::spec_keys::SpecValue::resolve_paths(&mut self.$field, folder);)*
            }
        }
    };
}

/// Defines a choice of a workload file: an enum whose variants have their meaning as doc comment. A variant has no
/// parameter, one parameter, or a table whose keys are required unless they have `= default`.
macro_rules! spec_choice {
    (
        $(#[$attribute:meta])*
        pub enum $name:ident $(, default $default:ident)? {
            $(
                $(#[doc = $meaning:literal])+
                $variant:ident
                $(($payload:ty))?
                $({ $(
                    $(#[doc = $key_meaning:literal])+
                    $key:ident: $type:ty $(= $optional:ident)?,
                )+ })?,
            )+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "snake_case", deny_unknown_fields)]
        pub enum $name {
            $(
                $(#[doc = $meaning])+
                $variant
                $(($payload))?
                $({ $(
                    $(#[doc = $key_meaning])+
                    $(#[serde($optional)])?
                    $key: $type,
                )+ })?,
            )+
        }

        $(impl Default for $name {
            fn default() -> Self {
                Self::$default
            }
        })?

        impl $crate::spec_keys::SpecValue for $name {
            fn value_type_name() -> String {
                "choice".to_owned()
            }

            fn choices() -> Vec<$crate::spec_keys::SpecChoice> {
                use $crate::spec_keys;
                vec![$({
                    let payload = spec_keys::first_element([
                        $(Some(<$payload as spec_keys::SpecValue>::value_type_name()),)? None
                    ]);
                    let keys: Vec<spec_keys::SpecKey> = vec![$($(spec_keys::SpecKey {
                        name: stringify!($key),
                        kind: <$type as spec_keys::SpecValue>::value_type_name(),
                        default: spec_keys::first_element([$(spec_keys::default_text(&<$type>::$optional()),)? "required".to_owned()]),
                        meaning: spec_keys::join_doc_lines(&[$($key_meaning),+]),
                        choices: <$type as spec_keys::SpecValue>::choices(),
                    },)+)?];
                    spec_keys::SpecChoice {
                        value: spec_keys::choice_value(stringify!($variant), payload, &keys),
                        meaning: spec_keys::join_doc_lines(&[$($meaning),+]),
                        keys,
                    }
                },)+]
            }

            fn resolve_paths(&mut self, _folder: &std::path::Path) {
                $($(if let Self::$variant(value) = self {
                    <$payload as $crate::spec_keys::SpecValue>::resolve_paths(value, _folder);
                })?)+
            }
        }
    };
}

pub(crate) use {spec_choice, spec_table};
